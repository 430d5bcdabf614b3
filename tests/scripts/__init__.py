"""Scripts that the tests run as they are, or with one line changed."""
