"""A corpus of bad inputs: each is refused by one sentence and exit code 2 (`test_bad_inputs`)."""
