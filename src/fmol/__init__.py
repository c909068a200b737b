"""Federated multi-objective learning."""
