// Server-sent events by fetch, which can send the admin key in a header. Never gives up.

const SILENT_MS = 6000;
const LONGEST_PAUSE_MS = 5000;

export async function listen(open, { hello, tick, locked, lost }) {
  let pause_ms = 250, asked = false;
  for (;;) {
    try {
      const answer = await open();
      if (answer.status === 401) {
        await locked(asked);
        asked = true;
        continue;
      }
      if (!answer.ok) throw new Error(`the replica answers ${answer.status}`);
      asked = false;
      for await (const [event, body] of events(answer.body)) {
        (event === "hello" ? hello : tick)(body);
        pause_ms = 250;
      }
      lost("the replica shuts down: connecting to another");
    } catch (error) {
      console.info(error);
      lost("connection lost: trying again");
    }
    await new Promise((over) => setTimeout(over, pause_ms));
    pause_ms = Math.min(2 * pause_ms, LONGEST_PAUSE_MS);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await inTime(reader.read());
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const [event, data] = text.slice(0, end).split("\n");
        yield [event.slice("event: ".length), JSON.parse(data.slice("data: ".length))];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function inTime(promise) {
  let timer;
  const silent = new Promise((_, reject) => { timer = setTimeout(() => reject(new Error("the stream is silent")), SILENT_MS); });
  return Promise.race([promise, silent]).finally(() => clearTimeout(timer));
}
