"""The engine contract (SGLang's HTTP routes) and its one client. Needs neither torch nor
transformers.
"""
