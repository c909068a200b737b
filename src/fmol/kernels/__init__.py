"""What is written by hand for a device. Imported only where there is one, but for `fallbacks`."""
