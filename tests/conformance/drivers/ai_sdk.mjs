// An agent of the Vercel AI SDK over chat, Responses or Anthropic Messages; the chat one streams.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { BASE_URL, ANTHROPIC_BASE, KEY, TASK } = process.env;
const way = process.argv[2];
const model = {
  chat: () => createOpenAICompatible({ name: "gw", baseURL: BASE_URL, apiKey: KEY })("rl-model"),
  responses: () => createOpenAI({ baseURL: BASE_URL, apiKey: KEY }).responses("rl-model"),
  anthropic: () => createAnthropic({ baseURL: `${ANTHROPIC_BASE}/v1`, apiKey: KEY })("rl-model"),
}[way]();
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const asked = { model, system: "Use the tool.", prompt: TASK, tools: { add }, stopWhen: stepCountIs(6), maxRetries: 0 };
const text = way === "chat" ? await streamText(asked).text : (await generateText(asked)).text;
console.log(text);
if (!text) process.exit(1);
