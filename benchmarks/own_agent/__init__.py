"""Does `opd serve`, as documented, learn from an agent and from people that it has never met?

    python -m benchmarks.own_agent --kinds unit order --seeds 0 1 2

The policy is the tool lab's tiny model, so the tools and the names are those of its world. Nothing
else is the lab's: people, their words, the agent, what tools return and the scoring stand here.
"""
