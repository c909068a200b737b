"""What is written for a GPU by hand. Imported only where there is one."""
