"""Schedulers: how mechanism, policy and victim rule become step plans. Policies and victim rules are in the folders
below.
"""
