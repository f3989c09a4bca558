// The `openai` Node client, as its documentation has it used, asking what a plan says.
//
//     node node_client.mjs BASE_URL PLAN RECORDS
//
// The plan is made by client_plan.py; what a record holds is told in openai_client.py. Times are ns of the
// monotonic clock (process.hrtime), the same that the server's truth is in.

import { readFileSync, writeFileSync } from "node:fs";

import OpenAI from "openai";
import { VERSION } from "openai/version";

const TIMEOUT_MS = 60_000;

const now = () => Number(process.hrtime.bigint());

class Record {
  constructor(ask) {
    this.id = ask.id;
    this.texts = [];
    this.refusals = [];
    this.finish = [];
    this.arrivals_ns = [];
    this.usage = null;
    this.error = null;
    this.misshapen = null;
    this.start_ns = now();
    this.end_ns = 0;
    this.choice(0);
  }

  choice(index) {
    for (let i = this.texts.length; i <= index; i++) {
      this.texts.push("");
      this.refusals.push("");
      this.finish.push(null);
      this.arrivals_ns.push([]);
    }
  }

  hear(index, text, refusal) {
    this.choice(index);
    if (text || refusal) {
      this.arrivals_ns[index].push(now());
      this.texts[index] += text || "";
      this.refusals[index] += refusal || "";
    }
  }

  ends(index, finish) {
    this.choice(index);
    this.finish[index] = finish || this.finish[index];
  }
}

// A chunk, or the whole answer, of chat or of completions.
function readChoices(record, answer) {
  if (answer.usage) record.usage = [answer.usage.prompt_tokens, answer.usage.completion_tokens];
  for (const choice of answer.choices) {
    const said = choice.delta ?? choice.message ?? { content: choice.text };
    record.hear(choice.index, said.content, said.refusal);
    record.ends(choice.index, choice.finish_reason);
  }
}

function readResponse(record, response) {
  record.ends(0, response.incomplete_details?.reason ?? response.status);
  record.usage = [response.usage.input_tokens, response.usage.output_tokens];
}

function readEvent(record, event) {
  if (event.type === "response.output_text.delta") record.hear(0, event.delta);
  if (event.type === "response.completed" || event.type === "response.incomplete") {
    readResponse(record, event.response);
  }
}

function bodyOf(ask) {
  const body = { model: ask.model };
  for (const name of ["seed", "n", "stop"]) if (name in ask) body[name] = ask[name];
  const responses = ask.call.startsWith("responses");
  if ("max_tokens" in ask) body[responses ? "max_output_tokens" : "max_tokens"] = ask.max_tokens;
  if (ask.usage) body.stream_options = { include_usage: true };
  if (responses) return { ...body, input: ask.prompt };
  if (ask.call === "completions") return { ...body, prompt: ask.prompt };
  return { ...body, messages: [{ role: "user", content: ask.prompt }] };
}

function same(said, heard) {
  if (said !== heard) throw new Error("the helper's answer is not what its events said");
}

async function call(client, ask, record) {
  const body = bodyOf(ask);
  const how = { headers: { "X-Request-Id": ask.id, ...ask.headers }, maxRetries: ask.retries ?? 0 };
  switch (ask.call) {
    case "chat":
    case "completions": {
      const api = ask.call === "chat" ? client.chat.completions : client.completions;
      if (!ask.stream) return readChoices(record, await api.create(body, how));
      for await (const chunk of await api.create({ ...body, stream: true }, how)) readChoices(record, chunk);
      return;
    }
    case "chat.helper": {
      const stream = client.chat.completions.stream(body, how);
      for await (const chunk of stream) readChoices(record, chunk);
      return same((await stream.finalChatCompletion()).choices[0].message.content, record.texts[0]);
    }
    case "responses": {
      if (!ask.stream) {
        const response = await client.responses.create(body, how);
        record.hear(0, response.output_text);
        return readResponse(record, response);
      }
      for await (const event of await client.responses.create({ ...body, stream: true }, how)) {
        readEvent(record, event);
      }
      return;
    }
    case "responses.helper": {
      const stream = client.responses.stream(body, how);
      for await (const event of stream) readEvent(record, event);
      return same((await stream.finalResponse()).output_text, record.texts[0]);
    }
    case "models": {
      for await (const model of client.models.list(how)) record.texts[0] += model.id;
      return;
    }
    default:
      throw new Error(`there is no call ${ask.call}`);
  }
}

async function askOne(client, ask) {
  const record = new Record(ask);
  try {
    await call(client, ask, record);
  } catch (error) {
    const kind = error instanceof OpenAI.OpenAIError ? `openai.${error.constructor.name}` : error.name;
    record.error = [kind, error.status ?? null, String(error.message)];
  }
  record.end_ns = now();
  return record;
}

const [baseURL, planFile, recordsFile] = process.argv.slice(2);
const plan = JSON.parse(readFileSync(planFile, "utf8"));
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: "none", timeout: TIMEOUT_MS });
const records = [];
for (const ask of plan.filter((ask) => !ask.at_once)) records.push(await askOne(client, ask));
records.push(...(await Promise.all(plan.filter((ask) => ask.at_once).map((ask) => askOne(client, ask)))));
writeFileSync(recordsFile, JSON.stringify({ version: VERSION, records }));
