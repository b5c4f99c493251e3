"""The arrays that tests draw, and what is right for them.

array_case, layouts, elements, dtypes   one array: its framework, layout, values
frameworks                              which frameworks are installed, and their arrays
rank_values                             the values of all ranks
oracle                                  what a reduction must give
"""
