// One tool conversation by the openai JavaScript SDK; what it is about comes as JSON on stdin, the
// last completion goes as JSON to stdout.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const given = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: given.base_url, apiKey: "key", maxRetries: 0 });
const messages = [{ role: "system", content: given.system }];

async function ask() {
  const request = { model: "policy", messages, tools: given.tools, temperature: 0 };
  if (!given.stream) return client.chat.completions.create(request);
  return client.chat.completions.stream(request).finalChatCompletion();
}

let completion;
for (const text of given.users) {
  messages.push({ role: "user", content: text });
  for (let step = 0; step < given.max_steps; step++) {
    completion = await ask();
    const { role, content, tool_calls } = completion.choices[0].message;
    messages.push({ role, content, ...(tool_calls?.length ? { tool_calls } : {}) });
    for (const call of tool_calls ?? []) {
      JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: given.result });
    }
    if (!tool_calls?.length) break;
  }
}
console.log(JSON.stringify({ id: completion.id, content: completion.choices[0].message.content }));
