"""Does `opd serve`, as documented, learn from an agent and from people that it has never met?

    python -m benchmarks.own_agent --kinds unit order --seeds 0 1 2

The policy is the tool lab's tiny model, so the tools and the names are those of its world. Nothing
else is the lab's: people, their words, the agent, what tools return and the scoring stand here.

    wishes.py   what people wish for, the words of their objections and of open opposites
    people.py   who asks, objects once, goes on or leaves
    travel.py   the tools, executed
    agent.py    the OpenAI client and its loop; no header of this project
    measure.py  rates at temperature 1, by side requests, on names that nothing has learned from
    serving.py  `opd serve` as a process, its hints over HTTP, its store afterwards
    turned.py   the same wishes the other way round, and a hint for each value
    protocol.py how cells are made
    scripted.py judges by rule, for controls; judging.py serves them
    cell.py     one run: measure, quiet people, objecting people, wait for the hints, measure
    table.py    the headline table; picture.py draws it
    rounds.py   what became of wishes round by round
    poisoned.py two tenants: what one's objections change for the other
    baselines.py other ways to learn from what a run recorded: recorded.py reads it, offline.py
                learns
    reading.py  how the untrained judge reads each objection, and what hints lower (falls.py)

A run begins with people who have the same wishes and leave without a word at what they do not like:
what an endpoint has recorded before anybody objects. Then people object, each at most once to one
request, until so many objections were made to each wish; nobody talks while the hints are waited
for. Nobody asks openly for the opposite but in measuring.
"""
