"""The laboratory: runs, reports, the experiments of the papers, and the command line, built on
`wellposed`."""
