// The Vercel AI SDK: a conversation with a tool, through the door that the first argument names and
// whole or streamed as the second says. SERVED_URL, USERS and RESULT say the rest.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [door, form] = process.argv.slice(2);
const { SERVED_URL: url, USERS: users, RESULT: result } = process.env;

// They retry by themselves; here a second request would hide what was wrong with the first.
const maxRetries = 0;
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "key" });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "key" });
const models = {
  chat: () => openai.chat("policy"),
  responses: () => openai.responses("policy"),
  messages: () => anthropic("policy"),
};

const tools = {
  get_weather: tool({
    description: "Weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => JSON.parse(result),
  }),
};

async function whole(request) {
  return generateText(request);
}

async function streamed(request) {
  const reply = streamText({
    ...request,
    onError: ({ error }) => {
      throw error;
    },
  });
  let text = "";
  for await (const delta of reply.textStream) text += delta;
  return { text, steps: await reply.steps, response: await reply.response };
}

const ask = { whole, streamed }[form];
const messages = [];
for (const text of JSON.parse(users)) {
  messages.push({ role: "user", content: text });
  const reply = await ask({
    model: models[door](),
    system: "You are a traveller's helper.",
    messages,
    tools,
    stopWhen: stepCountIs(5),
    // What a Claude may say at most is known to the SDK; of other models it warns.
    maxOutputTokens: 4096,
    maxRetries,
  });
  messages.push(...reply.response.messages);
  const last = reply.steps.at(-1);
  console.log(
    JSON.stringify({
      answer: last.text,
      calls: reply.steps.map((step) => step.toolCalls.map((call) => call.input)),
      finish: last.finishReason,
      output_tokens: last.usage.outputTokens,
    }),
  );
}
