"""Benchmarks: each compares with something measured in the same run. Never part of the tests."""
