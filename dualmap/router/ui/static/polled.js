// A panel whose figures no frame has: it asks the replica for them every two seconds while it is of use.

const EVERY_MS = 2000;

export class Polled {
  // `ask` fetches a path with the admin key. A subclass says what to ask about a pool (`path`) and draws the answer; it returns
  // whether there is anything to see.
  constructor(panel, ask) {
    this.panel = panel;
    this.body = panel.querySelector("tbody");
    this.ask = ask;
    this.pool = null;
    this.asking = false;
    setInterval(() => this.poll(), EVERY_MS);
  }

  // `any`: there may be something to see in this pool.
  show(pool, any) {
    this.pool = any ? pool : null;
    if (!any) this.panel.hidden = true;
    else if (this.panel.hidden) this.poll();
  }

  async poll() {
    if (this.pool === null || this.asking || document.hidden) return;
    this.asking = true;
    try {
      const pool = this.pool, answer = await this.ask(this.path(encodeURIComponent(pool)));
      if (answer.ok && pool === this.pool) this.panel.hidden = !this.draw(await answer.json());
    } catch (error) {
      console.info(error);
    } finally {
      this.asking = false;
    }
  }
}
