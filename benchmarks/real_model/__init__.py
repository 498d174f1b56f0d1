"""Does `opd serve` teach a real pretrained model what its users silently want?

    ./run.sh models
    python -m benchmarks.real_model --weights lora full

The policy is SmolLM2-135M-Instruct, trained by others on real-world text. It calls no tools: people
ask it questions, and object to answers that are not as they wish. A rule judges, because a model of
this size cannot: the rule knows the sentences of this benchmark.

    wishes.py   three wishes, how an answer shows them, and the words of people
    judge.py    the rule that plays the judge
    chat.py     the OpenAI client, people, and rates at temperature 1 by side requests
    text.py     perplexity on English text that is not trained on here

Each cell is a wish with one kind of weights, in a run folder of its own. It is measured before and
with the hint in the prompt; then people object, the cell waits for the hints, and everything is
measured again.
"""
