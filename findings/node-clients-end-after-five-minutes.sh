#!/bin/sh
# openai 6.49.0 and @anthropic-ai/sdk 1.14.0 from npm on Node 20 (its own `fetch`). Takes 5 minutes.
#
# Guess: both wait for an answer as long as their `timeout` says, 10 minutes by default, here an hour.
# Seen: both raise APIConnectionTimeoutError after 5 minutes without headers, whatever `timeout` is: Node's `fetch`
# has a limit of its own (`headersTimeout`; `bodyTimeout` is the same between two chunks), and their `timeout` cannot
# raise it. By default both then send the request again, twice.
# For users: an answer that is not streamed and takes 6 minutes is computed three times and never arrives; the router
# sees clients that leave after 300 s. Stream, with comments while nothing comes; or give the clients a `fetch` whose
# dispatcher has other limits.
set -eu
command -v node >/dev/null && command -v npm >/dev/null || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && npm install --silent --no-audit --no-fund openai@6.49.0 @anthropic-ai/sdk@1.14.0 >/dev/null) || exit 2
cat > "$folder/wait.mjs" <<'PROGRAM'
import http from 'node:http';
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';

const server = http.createServer(request => request.resume());  // reads, and never answers
server.requestTimeout = server.headersTimeout = server.timeout = 0;
await new Promise(listening => server.listen(0, '127.0.0.1', listening));
const url = `http://127.0.0.1:${server.address().port}`;
const options = {apiKey: 'k', maxRetries: 0, timeout: 3600 * 1000};
const messages = [{role: 'user', content: 'hi'}];
const calls = {
  openai: () => new OpenAI({baseURL: `${url}/v1`, ...options}).chat.completions.create({model: 'm', messages}),
  anthropic: () => new Anthropic({baseURL: url, ...options}).messages.create({model: 'm', max_tokens: 5, messages}),
};
const begun = Date.now();
const ended = await Promise.all(Object.entries(calls).map(async ([name, call]) => {
  const failure = await Promise.race([
    call().then(() => 'answered', error => error.constructor.name),
    new Promise(give_up => setTimeout(give_up, 400 * 1000, 'still waiting')),
  ]);
  const seconds = (Date.now() - begun) / 1000;
  console.log(`Node ${process.version}, ${name}, timeout of an hour: ${failure} after ${seconds.toFixed(0)} s`);
  return failure === 'APIConnectionTimeoutError' && seconds >= 299;
}));
process.exit(ended.every(Boolean) ? 0 : 1);
PROGRAM
(cd "$folder" && node wait.mjs)
