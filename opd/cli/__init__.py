"""The command line: one module a command. It parses options and says what went wrong; the work is
done elsewhere.
"""
