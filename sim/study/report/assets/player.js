// The block maps' controls: one or two maps, locked in time.

class Player {
  constructor(section, maps, colours) {
    this.section = section;
    this.maps = maps;
    this.colours = colours;
    this.pools = new Map();
    this.part = (name) => section.querySelector(`[data-part="${name}"]`);
    this.views = [0, 1].map(() => new MapView(colours, { onInspect: (block) => this.inspect(block) }));
    this.part("maps").append(...this.views.map((view) => view.root));
    this.playing = false;
    this.zoom = 0;
    this.wire();
  }

  async start() {
    for (const [place, side] of ["left", "right"].entries()) {
      const choice = this.part(side);
      if (place) choice.append(new Option("none", "-1"));
      this.maps.forEach((map, i) => choice.append(new Option(map.label, String(i))));
      choice.value = String(place < this.maps.length ? place : -1);
      choice.closest("label").hidden = this.maps.length < 2;
      choice.addEventListener("change", () => this.choose());
    }
    await this.choose();
  }

  wire() {
    const press = { play: () => this.toggle(), back: () => this.step(-1), forward: () => this.step(1) };
    press["next-repack"] = () => this.repack(1);
    press["last-repack"] = () => this.repack(-1);
    press["zoom-in"] = () => this.zoomBy(1);
    press["zoom-out"] = () => this.zoomBy(-1);
    for (const [name, action] of Object.entries(press)) this.part(name).addEventListener("click", action);
    this.part("slider").addEventListener("input", (event) => this.seek(Number(event.target.value)));
    this.part("inspect").addEventListener("input", (event) => {
      this.tellInspected();
      this.views.slice(0, this.shown.length).forEach((view) => view.reveal(Number(event.target.value)));
    });
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.part("speed").value = "2";
    document.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.layout()).observe(this.part("maps"));
  }

  async choose() {
    this.pause();
    const chosen = ["left", "right"].map((side) => Number(this.part(side).value)).filter((i) => i >= 0);
    const shown = [...new Set(chosen)];
    for (const i of shown) if (!this.pools.has(i)) this.pools.set(i, await Pool.read(this.maps[i]));
    this.shown = shown.map((i) => this.pools.get(i));
    this.times = [...new Set(this.shown.flatMap((pool) => pool.frames.time_s))].sort((a, b) => a - b);
    const range = [this.times[0], this.times.at(-1)];
    const most = Math.max(...this.shown.flatMap((pool) => pool.frames.used));
    this.strips = this.shown.map((pool, i) => {
      const label = this.maps[shown[i]].label;
      this.views[i].setPool(pool, label);
      return new Strip(pool, this.colours, { label, range, top: most, onSeek: (time) => this.seek(time) });
    });
    this.views.forEach((view, i) => (view.root.hidden = i >= this.shown.length));
    this.part("strips").replaceChildren(
      ...this.strips.map((strip, i) => {
        const row = element("div", { class: "strip-row" });
        if (this.shown.length > 1) row.append(element("span", { class: "strip-label" }, this.maps[shown[i]].label));
        row.append(strip.root);
        return row;
      }),
    );
    this.part("first").textContent = `${range[0].toFixed(2)} s`;
    this.part("last").textContent = `${range[1].toFixed(2)} s`;
    const slider = this.part("slider");
    [slider.min, slider.max] = range;
    this.part("inspect").max = String(Math.max(...this.shown.map((pool) => pool.map.num_blocks)) - 1);
    this.part("sampled").textContent = this.shown.map((pool, i) => this.sampled(pool, shown[i])).join(" ");
    this.time = Math.min(Math.max(this.time ?? this.opening(), range[0]), range[1]);
    this.layout();
  }

  // The page opens where there is something to see: at the repack that emptied most, or at most blocks in use.
  opening() {
    const repacks = this.shown.filter((pool) => pool.frames.from.some((blocks) => blocks.length));
    const pool = repacks[0] ?? this.shown[0];
    const weight = repacks.length ? pool.frames.from.map((blocks) => blocks.length) : pool.frames.used;
    return pool.frames.time_s[weight.indexOf(Math.max(...weight))];
  }

  sampled(pool, index) {
    const { map, count } = pool;
    const shown = new Set(pool.frames.step).size;
    const which = this.shown.length > 1 ? `${this.maps[index].label}: ` : "";
    const share = shown < map.steps ? `${whole(shown)} of ${whole(map.steps)} steps shown` : `all ${whole(map.steps)} steps shown`;
    return `${which}${share}, of ${whole(map.events)} events in ${whole(count)} frames.`;
  }

  layout() {
    if (!this.shown) return;
    const views = this.views.slice(0, this.shown.length);
    const fitting = Math.min(...views.map((view) => view.fittingSize()));
    const place = Math.min(Math.max(CELL_SIZES.indexOf(fitting) + this.zoom, 0), CELL_SIZES.length - 1);
    this.zoom = place - CELL_SIZES.indexOf(fitting);
    views.forEach((view) => view.layout(CELL_SIZES[place]));
    this.part("zoom-in").disabled = place === CELL_SIZES.length - 1;
    this.part("zoom-out").disabled = place === 0;
    const parts = CELL_SIZES[place] >= BAR_FROM;
    this.part("legend-parts").hidden = !parts;
    this.part("legend-ramp").hidden = parts;
    this.seek(this.time);
  }

  seek(time) {
    this.time = time;
    this.index = this.times.findLastIndex((t) => t <= time + 1e-9);
    if (this.index < 0) this.index = 0;
    this.shown.forEach((pool, i) => {
      pool.seek(pool.frameAt(time + 1e-9));
      this.views[i].draw();
      this.strips[i].draw(time);
    });
    const slider = this.part("slider");
    slider.value = String(time);
    const [pool] = this.shown;
    const step = Math.max(0, pool.frames.step[pool.at]);
    slider.setAttribute("aria-valuetext", `step ${whole(step)}, ${time.toFixed(2)} s, ${whole(pool.frames.used[pool.at])} blocks used`);
    this.part("clock").textContent = `step ${whole(step)} · ${time.toFixed(3)} s`;
    this.part("events").replaceChildren(
      ...this.shown.map((shown, i) => {
        const line = element("div");
        if (this.shown.length > 1) line.append(element("b", {}, `${this.views[i].title.textContent}: `));
        line.append(this.views[i].events());
        return line;
      }),
    );
    this.tellInspected();
  }

  step(by) {
    this.pause();
    this.go(this.index + by);
  }

  go(index) {
    this.seek(this.times[Math.min(Math.max(index, 0), this.times.length - 1)]);
  }

  repack(direction) {
    this.pause();
    const here = this.times[this.index];
    const times = this.shown.flatMap((pool) => pool.frames.time_s.filter((_, i) => pool.frames.from[i].length));
    const beyond = times.filter((time) => (time - here) * direction > 0);
    if (!beyond.length) {
      const none = `no repack ${direction > 0 ? "after" : "before"} this`;
      this.part("events").replaceChildren(element("div", {}, none));
      return;
    }
    this.seek(direction > 0 ? Math.min(...beyond) : Math.max(...beyond));
    this.shown.forEach((pool, i) => {
      const [first] = pool.frames.from[pool.at];
      if (first !== undefined) this.views[i].reveal(first);
    });
  }

  toggle() {
    if (this.playing) return this.pause();
    if (this.index >= this.times.length - 1) this.go(0);
    this.playing = true;
    this.tellPlaying();
    let last = performance.now();
    const tick = (now) => {
      if (!this.playing) return;
      const due = Math.floor(((now - last) / 1000) * Number(this.part("speed").value));
      if (due > 0) {
        last = now;
        this.go(this.index + due);
        if (this.index >= this.times.length - 1) return this.pause();
      }
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  pause() {
    this.playing = false;
    this.tellPlaying();
  }

  tellPlaying() {
    this.part("play").textContent = this.playing ? "❚❚ Pause" : "▶ Play";
    this.part("play").setAttribute("aria-pressed", String(this.playing));
    this.part("events").setAttribute("aria-live", this.playing ? "off" : "polite");
  }

  zoomBy(by) {
    this.zoom += by;
    this.layout();
  }

  inspect(block) {
    this.part("inspect").value = String(block);
    this.tellInspected();
  }

  tellInspected() {
    const text = this.part("inspect").value;
    const block = Number(text);
    const known = (pool) => text !== "" && Number.isInteger(block) && block >= 0 && block < pool.map.num_blocks;
    this.part("inspected").textContent = this.shown
      .filter(known)
      .map((pool, i) => (this.shown.length > 1 ? `${this.views[i].title.textContent}: ` : "") + pool.describe(block).join("; "))
      .join(" | ");
  }

  // Elsewhere on the page the keys scroll, as they always do.
  inView() {
    const box = this.section.getBoundingClientRect();
    return box.bottom > 0 && box.top < window.innerHeight;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.shown || !this.inView()) return;
    // These use the keys themselves: they are typed into, or scrolled.
    if (event.target.closest("input:not([type=range]), select, textarea, dialog, .scroller, .table, pre")) return;
    if (event.key === " " && event.target.matches("button, a, summary")) return;
    const actions = {
      " ": () => this.toggle(),
      ArrowLeft: () => this.step(event.shiftKey ? -10 : -1),
      ArrowRight: () => this.step(event.shiftKey ? 10 : 1),
      Home: () => this.step(-Infinity),
      End: () => this.step(Infinity),
      n: () => this.repack(1),
      p: () => this.repack(-1),
      "+": () => this.zoomBy(1),
      "-": () => this.zoomBy(-1),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}
