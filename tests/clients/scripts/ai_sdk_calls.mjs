// `ai`, the AI SDK for JavaScript: text, streams, tools and several turns with its providers for responses, chat completions and Anthropic's messages.
//
// It is called as the other scripts are and prints the same: one line of JSON for each call.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const [baseUrl = "http://127.0.0.1:8000", model = "overture-demo"] = process.argv.slice(2);
const address = { apiKey: "none", baseURL: `${baseUrl}/v1` };
const providers = {
  responses: createOpenAI(address)(model),
  "chat completions": createOpenAICompatible({ ...address, name: "overture", includeUsage: true, supportsStructuredOutputs: true })(model),
  "chat completions of @ai-sdk/openai": createOpenAI(address).chat(model),
  messages: createAnthropic(address)(model),
};
const hello = { role: "user", content: "Hello! My name is Ada." };
const question = { role: "user", content: "What is the weather like in Paris?" };
const city = z.object({ city: z.string().max(20) }).strict();
const asked = [];
const tools = {
  get_weather: tool({
    description: "Today's weather in a city.",
    inputSchema: city,
    execute: (input) => {
      asked.push(input);
      return `Sunny in ${input.city}.`;
    },
  }),
};

async function call(name, check) {
  const line = { call: name, ok: true };
  try {
    await check();
  } catch (error) {
    Object.assign(line, {
      ok: false,
      error: `${error.name}: ${error.message}`.slice(0, 600),
      traceback: `${error.stack}\n${error.responseBody ?? ""}`.split("\n").slice(0, 12),
    });
  }
  console.log(`\n${JSON.stringify(line)}`);
}

function settings(provider, messages, more = {}) {
  return { model: providers[provider], messages, maxOutputTokens: 64, maxRetries: 0, onError() {}, ...more };
}

async function text(provider) {
  const reply = await generateText(settings(provider, [hello]));
  assert(reply.text && ["stop", "length"].includes(reply.finishReason), reply.finishReason);
  assert(reply.usage.inputTokens > 0 && reply.usage.outputTokens > 0, JSON.stringify(reply.usage));
}

async function streamed(provider) {
  const reply = streamText(settings(provider, [hello]));
  let written = "";
  for await (const part of reply.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") written += part.text;
  }
  assert(written && written === (await reply.text));
  assert(["stop", "length"].includes(await reply.finishReason), await reply.finishReason);
  assert((await reply.usage).outputTokens > 0);
}

async function twoTurns(provider) {
  const first = await generateText(settings(provider, [hello]));
  const messages = [hello, ...first.response.messages, { role: "user", content: "Who am I?" }];
  const second = await generateText(settings(provider, messages));
  assert(second.text && second.usage.inputTokens > first.usage.inputTokens);
}

function checkTool(reply) {
  const [made] = reply.toolCalls;
  assert.equal(made?.toolName, "get_weather");
  assert(city.safeParse(made.input).success && !made.invalid, JSON.stringify(made));
  assert.deepEqual(asked.at(-1), made.input);
  assert.equal(reply.toolResults[0].output, `Sunny in ${made.input.city}.`);
}

async function required(provider) {
  asked.length = 0;
  checkTool(await generateText(settings(provider, [question], { tools, toolChoice: "required" })));
}

async function requiredStreamed(provider) {
  asked.length = 0;
  const reply = streamText(settings(provider, [question], { tools, toolChoice: "required" }));
  const seen = [];
  for await (const part of reply.fullStream) {
    if (part.type === "error") throw part.error;
    seen.push(part.type);
  }
  assert(seen.includes("tool-input-delta") && seen.includes("tool-result"), seen.join(" "));
  checkTool({ toolCalls: await reply.toolCalls, toolResults: await reply.toolResults });
}

// The first step calls the tool, the second reads its result: what was called goes back to the server in the provider's own form.
async function stepsWithResult(provider) {
  const more = {
    tools,
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  };
  const reply = await generateText(settings(provider, [question], more));
  assert.equal(reply.steps.length, 2);
  checkTool(reply.steps[0]);
  assert(reply.text, JSON.stringify(reply.steps[1].content));
  const later = [question, ...reply.response.messages, { role: "user", content: "Thanks!" }];
  assert((await generateText(settings(provider, later, { tools, toolChoice: "none" }))).text);
}

async function object(provider) {
  const reply = await generateText(settings(provider, [question], { output: Output.object({ schema: city }) }));
  assert(city.safeParse(reply.output).success);
}

async function tooLong(provider) {
  const messages = [{ role: "user", content: "word ".repeat(6000) }];
  await assert.rejects(generateText(settings(provider, messages)), (error) => {
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /context|maximum|too long/);
    return true;
  });
}

for (const provider of Object.keys(providers)) {
  await call(`text, ${provider}`, () => text(provider));
  await call(`streamed, ${provider}`, () => streamed(provider));
  await call(`two turns, ${provider}`, () => twoTurns(provider));
  await call(`tool, required, ${provider}`, () => required(provider));
  await call(`tool, required and streamed, ${provider}`, () => requiredStreamed(provider));
  await call(`tool and its result, ${provider}`, () => stepsWithResult(provider));
  await call(`object, ${provider}`, () => object(provider));
  await call(`prompt that is too long, ${provider}`, () => tooLong(provider));
}
