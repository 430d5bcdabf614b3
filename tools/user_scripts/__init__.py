"""Training scripts as users write them, put together from parts by number, run with and without us.

`models` has the models and batches, `parts` what users hang on them, `doors` the two kinds of
trainers, and `__main__` runs scripts and says which are equal, refused or different.
"""
