"""The hint memory: what was learned from objections, kept beyond the turns that it came from."""
