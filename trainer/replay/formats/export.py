"""This project's own export of its records: one JSON object a line, one line a session.

A line is UTF-8 JSON without NaN or Infinity. Its fields:

    format           "hindsight-opd-export"
    version          1; another version is a problem of the line
    session_id       text
    outcome_reward   number, or null
    renderer         fingerprint of the tokenizer and template that all ids are of, or null where
                     the line has no ids
    turns            list of turns; a parent stands before its children

A turn's fields. Those without "optional" must be there.

    turn_id          text, unique in the line
    parent_turn_id   the turn that this one continues, or null
    position         whole number >= 0, unique in the line: what a votes file calls `message_index`.
                     A store numbers its turns in the order in which they were recorded
    shared_messages  optional, 0. The prompt begins with this many messages of the parent's
                     conversation, which is the parent's prompt messages and then its response
    messages         the rest of the prompt, OpenAI chat messages; all of it if nothing is shared
    tools            optional list of OpenAI tool definitions. Absent: the parent's, [] without one
    response         the assistant message
    next_state       the messages that followed until the next assistant message, [] for none
    turn_type        optional, "main". "side" and "text" turns are context and do not train
    prompt_ids       optional, null. With `shared_ids`, what follows the shared ids
    shared_ids       optional, 0. The prompt ids begin with this many of the parent's
                     prompt_ids + response_ids
    response_ids     ids as sampled, stop token included; there if prompt_ids is
    rollout_logprobs optional, null. One finite number for each response id: natural log,
                     at `temperature`. There is no placeholder for a missing one: then null
    temperature      optional, 1.0; the sampling temperature, above 0
    votes            optional, null. Raw texts of the judge's votes, in their order

These are written for people and other programs, and are not read back, because a replay makes them
anew: `version_spans` ([[version, start, end], ...]), `state`, `drop_reason`, `drop_detail`, `hint`,
`finish_reason`, `created_at`. Any other field is ignored too, so that a later writer of version 1
may add some.

A redacted turn has its messages as they are kept and no ids. A deleted one is left out, with
`parent_turn_id` null and nothing shared in the turns that continued it.
"""
