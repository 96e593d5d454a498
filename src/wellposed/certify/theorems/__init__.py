"""The theorems of the papers, one file a paper: hypotheses, constants, and what they license."""
