"""A run as one page: its curves as pictures, and its rollouts to read.

What is shown is decided by plain functions over the run's files (:mod:`groundwire.train.report.charts`, ``browser``),
how it is shown by the page's own HTML, CSS and script. Whatever a model or a data set wrote reaches the page as data,
and the script puts it there as text: nothing of it is ever markup.
"""
