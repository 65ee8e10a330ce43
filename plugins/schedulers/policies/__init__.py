"""Policies: the order in which waiting requests are served."""
