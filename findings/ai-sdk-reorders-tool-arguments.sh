#!/bin/sh
# ai 6.0.326 (Vercel's AI SDK) with @ai-sdk/openai-compatible 2.0.92 and zod 4 from npm, on the second turn of an agent.
#
# Guess: the model's tool call goes back as the model wrote it, since the next prompt has to begin with the tokens that
# the engine has in its cache.
# Seen: it goes back as the tool got it: parsed, checked, and written again. With a schema of zod the keys stand in the
# order of the schema and not of the call, and keys that the schema lacks are gone; 1.0 becomes 1, 1e2 becomes 100.
# With `jsonSchema(...)`, as tools of MCP servers have, the keys stay, and numbers change. openai 6.49.0 (`runTools`)
# sends the text as it was.
# For users: chat templates render the arguments key by key, so the engine's blocks of its own answer are no hit, and
# the model reads calls that it did not make. Declare the fields in the order in which the model writes them, required
# ones first.
set -eu
command -v node >/dev/null && command -v npm >/dev/null || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7 openai@6.49.0 >/dev/null || exit 2
cat > agent.mjs <<'PROGRAM'
import http from 'node:http';
import { generateText, jsonSchema, stepCountIs, tool } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import OpenAI from 'openai';
import { z } from 'zod';

const written = '{"days": 1.0, "city": "Oslo", "unit": "C"}';
const bodies = [];
const server = http.createServer((request, response) => {
  let text = '';
  request.on('data', part => { text += part; });
  request.on('end', () => {
    const body = JSON.parse(text);
    bodies.push(body);
    const call = { id: 'call_1', type: 'function', function: { name: 'weather', arguments: written } };
    const first = body.messages.at(-1).role === 'user';
    const message = first ? { role: 'assistant', content: null, tool_calls: [call] } : { role: 'assistant', content: 'fine' };
    const choice = { index: 0, message, finish_reason: first ? 'tool_calls' : 'stop' };
    response.setHeader('content-type', 'application/json');
    response.end(JSON.stringify({ id: 'c', object: 'chat.completion', created: 1, model: 'm', choices: [choice] }));
  });
});
await new Promise(resolve => server.listen(0, '127.0.0.1', resolve));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;

const schema = {
  type: 'object', properties: { city: { type: 'string' }, days: { type: 'number' } }, required: ['city', 'days'],
};
const bySdk = inputSchema => () => generateText({
  model: createOpenAICompatible({ name: 'server', baseURL, apiKey: 'k' })('m'), prompt: 'hi', stopWhen: stepCountIs(2),
  tools: { weather: tool({ description: 'Weather.', inputSchema, execute: async () => 'sun' }) },
});
const runs = {
  'ai with zod': bySdk(z.object({ city: z.string(), days: z.number() })),
  'ai with jsonSchema': bySdk(jsonSchema(schema)),
  openai: () => new OpenAI({ baseURL, apiKey: 'k' }).chat.completions.runTools({
    model: 'm', messages: [{ role: 'user', content: 'hi' }],
    tools: [{ type: 'function', function: { name: 'weather', parameters: schema, parse: JSON.parse, function: () => 'sun' } }],
  }).finalContent(),
};
const expected = {
  'ai with zod': '{"city":"Oslo","days":1}', 'ai with jsonSchema': '{"days":1,"city":"Oslo","unit":"C"}', openai: written,
};
let asDescribed = true;
console.log(`the model wrote ${written}`);
for (const [name, run] of Object.entries(runs)) {
  bodies.length = 0;
  await run();
  const back = bodies[1].messages.find(each => each.role === 'assistant').tool_calls[0].function.arguments;
  console.log(`${name} sends back ${back}`);
  asDescribed &&= back === expected[name];
}
process.exit(asDescribed ? 0 : 1);
PROGRAM
node agent.mjs
