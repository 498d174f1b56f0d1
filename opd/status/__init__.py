"""How a run stands now, for whoever looks at it from another terminal. It reads and changes
nothing, and knows neither how the figures come about nor how a page shows them.
"""
