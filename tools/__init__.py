"""Commands for who changes the code: they write tables and records, and are run by hand."""
