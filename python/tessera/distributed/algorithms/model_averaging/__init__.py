"""Replicas that go their own way and meet from time to time."""
