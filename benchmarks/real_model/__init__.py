"""Does `opd serve` teach a real pretrained model what its users silently want?

    ./run.sh models
    python -m benchmarks.real_model --weights lora full

The policy is SmolLM2-135M-Instruct, trained by others on text of the world. It calls no tools:
people ask it questions, and object to answers that are not as they wish. Judging is a rule, since
a model of this size cannot judge: it knows the sentences of this benchmark.

    wishes.py   three wishes, how an answer shows them, and the words of people
    judge.py    the rule that plays the judge
    chat.py     the OpenAI client, people, and rates at temperature 1 by side requests
    text.py     perplexity on English text that nobody trained on here

Each cell is a wish with one kind of weights, in a run folder of its own: measured before; with the
hint in the prompt; then people object, hints are waited for, and all is measured again.
"""
