"""slime's advantage hook: the advantages of a rank's rows, on which all ranks agree, and the
metrics of their batch. It knows no loss.
"""
