#!/bin/sh
# ai 6.0.326 (Vercel's AI SDK) with @ai-sdk/openai-compatible 2.0.92, @langchain/openai 1.5.8, and openai 6.49.0 from
# npm, on `Retry-After`.
#
# Guess: all three wait as long as the header says, or give up where that is too long for them.
# Seen: openai does, for 61 s too. `ai` waits 3 s where the header says 3; above 60 s it takes the header for none, and
# comes back after 2 s. LangChain obeys 3 s of a 429, raises at once for 61 s, and does not read the header of a 503: it
# comes back within 2 s, and up to 6 times.
# For users: the longer a full server asks for, the sooner these come back, and 503s of a pool that is starting are
# repeated within seconds by one client and obeyed by another. Name 60 s at most where such clients matter, and answer
# 429 where LangChain should wait. The fleet's longest is 60 s (docs/operate/tenants.md).
set -eu
command -v node >/dev/null && command -v npm >/dev/null || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7 openai@6.49.0 \
  @langchain/openai@1.5.8 @langchain/core@1.4.0 >/dev/null || exit 2
cat > retries.mjs <<'PROGRAM'
import http from 'node:http';
import { generateText } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { ChatOpenAI } from '@langchain/openai';
import OpenAI from 'openai';

const clients = {
  ai: baseURL => generateText({ model: createOpenAICompatible({ name: 'server', baseURL, apiKey: 'k' })('m'), prompt: 'hi' }),
  langchain: baseURL => new ChatOpenAI({ model: 'm', apiKey: 'k', configuration: { baseURL } }).invoke('hi'),
  openai: baseURL => new OpenAI({ baseURL, apiKey: 'k' }).chat.completions.create({ model: 'm', messages: [{ role: 'user', content: 'hi' }] }),
};

/** What the client does within 6 seconds: the time until its second request, or null, and whether it has given up. */
async function seen(call, status, wait) {
  const times = [];
  const server = http.createServer((request, response) => {
    request.resume().on('end', () => {
      times.push(performance.now());
      response.writeHead(status, { 'content-type': 'application/json', 'retry-after': wait });
      response.end(JSON.stringify({ error: { message: 'full', type: 'server_error' } }));
    });
  });
  await new Promise(resolve => server.listen(0, '127.0.0.1', resolve));
  let gaveUp = false;
  call(`http://127.0.0.1:${server.address().port}/v1`).catch(() => { gaveUp = times.length === 1; });
  await new Promise(resolve => setTimeout(resolve, 6000));
  return { after: times.length > 1 ? (times[1] - times[0]) / 1000 : null, gaveUp };
}

const waits = found => found.after === null && !found.gaveUp;
const after = (least, most) => found => found.after !== null && found.after >= least && found.after < most;
const cases = [
  ['openai', 503, 3, after(2.9, 4.5)], ['openai', 503, 61, waits], ['openai', 429, 61, waits],
  ['ai', 503, 3, after(2.9, 4.5)], ['ai', 503, 59, waits], ['ai', 503, 61, after(1.9, 2.9)], ['ai', 429, 61, after(1.9, 2.9)],
  ['langchain', 429, 3, after(2.9, 5)], ['langchain', 429, 61, found => found.gaveUp], ['langchain', 503, 61, after(0.5, 2.9)],
];
const results = await Promise.all(cases.map(async ([name, status, wait, expected]) => {
  const found = await seen(clients[name], status, String(wait));
  const what = found.after === null ? (found.gaveUp ? 'gives up' : 'waits') : `comes back after ${found.after.toFixed(1)} s`;
  console.log(`${name}, ${status}, retry-after ${wait}: ${what}`);
  return expected(found);
}));
process.exit(results.every(Boolean) ? 0 : 1);
PROGRAM
node retries.mjs
