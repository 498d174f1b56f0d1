"""The command line: one module per command. It parses options and reports errors; the work is done
elsewhere.
"""
