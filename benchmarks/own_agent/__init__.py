"""Does `opd serve`, as documented, learn from an agent and from people that it has never met?

    python -m benchmarks.own_agent --kinds unit order --seeds 0 1 2

The policy is the tool lab's tiny model, so the tools and the names are those of its world. Nothing
else is the lab's: people, their words, the agent, tool results and scoring are defined here.

    wishes.py   what people wish for, the words of their objections and of open opposites
    people.py   people who ask, object once, go on or leave
    travel.py   the tools, executed
    agent.py    the OpenAI client and its loop; no header of this project
    measure.py  rates at temperature 1, by side requests, on names that no training has seen
    serving.py  `opd serve` as a process, its hints over HTTP, its store afterwards
    turned.py   the same wishes the other way round, and a hint for each value
    protocol.py the settings of all cells
    scripted.py judges by rule, for controls; judging.py serves them
    cell.py     one run: measure, quiet people, objecting people, wait for the hints, measure
    table.py    the headline table; picture.py draws it
    rounds.py   what became of wishes round by round
    poisoned.py two tenants: what one's objections change for the other
    baselines.py other ways to learn from what a run recorded: recorded.py reads it, offline.py
                learns
    reading.py  how the untrained judge reads each objection, and what hints lower (falls.py)

A run begins with people who have the same wishes and silently leave when they do not like
something: these are the records that an endpoint has before anybody objects. Then people object,
each at most once to one request, until each wish has had the given number of objections. Nobody
talks during the wait for the hints. Open requests for the opposite occur only in measurements.
"""
