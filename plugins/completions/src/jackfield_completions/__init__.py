"""Completions for jackfield: `/v1/completions`."""
