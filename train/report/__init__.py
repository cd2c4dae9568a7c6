"""A run as one page: its charts, and its rollouts to read.

What a model or a data set wrote reaches the page as data or escaped by the template; it never becomes markup.
"""
