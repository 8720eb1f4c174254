#!/bin/sh
# ai 6.0.326 (Vercel's AI SDK) with @ai-sdk/openai-compatible 2.0.92 from npm: a caller that has read enough of a
# stream.
#
# Guess: `break` out of `for await (const text of streamText(...).textStream)` closes the connection, as with the openai
# and LangChain packages for Node.
# Seen: the loop ends, and the answer is read on in the background to its last token, of `textStream` and `fullStream`
# alike. An `abortSignal` closes the connection at once.
# For users: pages that were left, and tools that found what they wanted, keep their places at the engine until the
# answer is whole, and nobody reads it. Abort where a loop is left (docs/getting-started/clients.md).
set -eu
command -v node >/dev/null && command -v npm >/dev/null || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && npm install --silent --no-audit --no-fund \
  ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 openai@6.49.0 zod@4.6.7 >/dev/null) || exit 2
cat > "$folder/leave.mjs" <<'PROGRAM'
import http from 'node:http';
import {createOpenAICompatible} from '@ai-sdk/openai-compatible';
import {streamText} from 'ai';
import OpenAI from 'openai';

const CHUNKS = 30;
let closed;

function chunk(number) {
  const reason = number === CHUNKS ? 'stop' : null;
  const choice = {index: 0, delta: {role: 'assistant', content: 'word '}, finish_reason: reason};
  return `data: ${JSON.stringify({id: 'c', object: 'chat.completion.chunk', created: 1, model: 'm', choices: [choice]})}\n\n`;
}

// sends ten chunks a second, and notes how many were sent when the connection closed
const server = http.createServer((request, response) => {
  request.resume();
  response.writeHead(200, {'content-type': 'text/event-stream'});
  let sent = 0;
  const timer = setInterval(() => {
    response.write(chunk(++sent));
    if (sent === CHUNKS) { clearInterval(timer); response.end('data: [DONE]\n\n'); }
  }, 100);
  response.on('close', () => { clearInterval(timer); closed(sent); });
});
await new Promise(listening => server.listen(0, '127.0.0.1', listening));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const model = createOpenAICompatible({name: 'own', baseURL, apiKey: 'k'})('m');
const openai = new OpenAI({baseURL, apiKey: 'k'});
const messages = [{role: 'user', content: 'hi'}];

async function leave(stream, abort = () => {}) {
  let read = 0;
  for await (const _ of stream) if (++read === 2) { abort(); break; }
}

function aborted() {
  const controller = new AbortController();
  const {textStream} = streamText({model, messages, abortSignal: controller.signal, onAbort: () => {}});
  return leave(textStream, () => controller.abort());
}

const calls = {
  'ai, textStream': () => leave(streamText({model, messages}).textStream),
  'ai, fullStream': () => leave(streamText({model, messages}).fullStream),
  'ai, aborted': aborted,
  'openai': async () => leave(await openai.chat.completions.create({model: 'm', messages, stream: true})),
};
const seen = {};
for (const [name, call] of Object.entries(calls)) {
  const end = new Promise(resolve => { closed = resolve; });
  const began = Date.now();
  await call();
  const left = Date.now() - began;
  seen[name] = await end === CHUNKS;
  console.log(`${name}: the loop was left after ${(left / 1000).toFixed(1)} s, the whole answer was read: ${seen[name]}`);
}
const expected = {'ai, textStream': true, 'ai, fullStream': true, 'ai, aborted': false, 'openai': false};
process.exit(JSON.stringify(seen) === JSON.stringify(expected) ? 0 : 1);
PROGRAM
(cd "$folder" && node leave.mjs)
