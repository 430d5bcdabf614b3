"""Scripts that the tests start as a user would."""
