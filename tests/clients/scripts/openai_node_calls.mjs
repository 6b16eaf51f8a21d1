// `openai` and `@anthropic-ai/sdk`, the SDKs for JavaScript: what their helpers do with streams, tools and schemas, by all three APIs.
//
// It is called as the other scripts are and prints the same: one line of JSON for each call.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import OpenAI from "openai";
import { zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseUrl = "http://127.0.0.1:8000", model = "overture-demo"] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: baseUrl, apiKey: "none", maxRetries: 0 });
const question = "What is the weather like in Paris?";
const messages = [{ role: "user", content: question }];
const city = z.object({ city: z.string().max(20) });
const weather = {
  name: "get_weather",
  description: "Today's weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
  parse: JSON.parse,
  function: (input) => `Sunny in ${input.city}.`,
};
const claudesWeather = betaZodTool({
  name: weather.name,
  description: weather.description,
  inputSchema: city,
  run: weather.function,
});

async function call(check) {
  const name = check.name.replace(/[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`);
  const line = { call: name, ok: true };
  try {
    await check();
  } catch (error) {
    Object.assign(line, {
      ok: false,
      error: `${error.name}: ${error.message}`.slice(0, 600),
      traceback: `${error.stack}`.split("\n").slice(0, 12),
    });
  }
  console.log(`\n${JSON.stringify(line)}`);
}

async function chatParse() {
  const wish = { model, messages, max_tokens: 64, response_format: zodResponseFormat(city, "weather") };
  assert((await openai.chat.completions.parse(wish)).choices[0].message.parsed.city);
}

async function chatStreamWithASchema() {
  const wish = { model, messages, max_tokens: 64, response_format: zodResponseFormat(city, "weather"), stream_options: { include_usage: true } };
  const stream = openai.chat.completions.stream(wish);
  const done = [];
  stream.on("content.done", (event) => done.push(event.parsed));
  await stream.done();
  assert(done[0].city && (await stream.totalUsage()).completion_tokens > 0);
}

async function chatRunTools() {
  for (const stream of [false, true]) {
    const wish = { model, messages, max_tokens: 64, tools: [{ type: "function", function: weather }], stream };
    const runner = openai.chat.completions.runTools(wish);
    assert.match(await runner.finalContent(), /unny/);
    assert.equal(runner.messages.length, 4);
  }
}

async function responsesParse() {
  const wish = { model, input: question, max_output_tokens: 64, text: { format: zodTextFormat(city, "weather") } };
  assert((await openai.responses.parse(wish)).output_parsed.city);
}

async function responsesStreamWithATool() {
  const tool = zodResponsesFunction({ name: weather.name, description: weather.description, parameters: city });
  const stream = openai.responses.stream({ model, input: question, max_output_tokens: 64, tools: [tool], tool_choice: "required" });
  const [made] = (await stream.finalResponse()).output;
  assert(made.name === "get_weather" && made.parsed_arguments.city);
}

async function responsesStreamThatIsTakenUpAgain() {
  const stream = await openai.responses.create({ model, input: "Hello!", max_output_tokens: 16, background: true, stream: true });
  let id, last;
  for await (const event of stream) {
    id ??= event.response?.id;
    last = event.sequence_number;
    if (last > 2) break;
  }
  const rest = [];
  for await (const event of await openai.responses.retrieve(id, { stream: true, starting_after: last })) rest.push(event);
  assert(rest[0].sequence_number === last + 1 && rest.at(-1).type.startsWith("response."));
}

async function messagesParse() {
  const wish = { model, messages, max_tokens: 64, output_config: { format: zodOutputFormat(city) } };
  assert((await anthropic.messages.parse(wish)).parsed_output.city);
}

async function messagesStream() {
  const stream = anthropic.messages.stream({ model, messages, max_tokens: 32 });
  let written = "";
  stream.on("text", (piece) => (written += piece));
  const final = await stream.finalMessage();
  assert(written && written === final.content[0].text);
}

async function messagesToolRunner() {
  const reply = await anthropic.beta.messages.toolRunner({ model, messages, max_tokens: 64, tools: [claudesWeather], max_iterations: 3 });
  assert.match(reply.content[0].text, /unny/);
}

async function models() {
  for (const client of [openai, anthropic]) {
    const found = [];
    for await (const each of client.models.list()) found.push(each.id);
    assert(found.includes(model));
  }
}

for (const check of [
  chatParse,
  chatStreamWithASchema,
  chatRunTools,
  responsesParse,
  responsesStreamWithATool,
  responsesStreamThatIsTakenUpAgain,
  messagesParse,
  messagesStream,
  messagesToolRunner,
  models,
]) {
  await call(check);
}
