// The pool over time: reads the streams that block_map.py writes, and goes to any of its frames.

const ROLE = { FREE: 0, HELD: 1, SHARED: 2, SOURCE: 3, DESTINATION: 4, TARGET: 5, LEFT: 6 };
const ROLE_WORDS = [
  "free",
  "in the table of",
  "shared, in the table of",
  "source of a copy, in the table of",
  "destination of a copy for",
  "filled by a copy, in the table of",
  "read by a copy of the former",
];
const KEY_FRAMES_BYTES = 64 * 2 ** 20;
const BITS_SET = Uint8Array.from({ length: 256 }, (_, byte) => byte.toString(2).replaceAll("0", "").length);

async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Stream {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  number() {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = this.bytes[this.at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  }
}

class Pool {
  constructor(map, streams) {
    this.map = map;
    this.frames = map.frames;
    this.count = map.frames.step.length;
    this.width = Math.ceil(map.block_size / 8);
    this.streams = streams;
    const blocks = map.num_blocks;
    this.role = new Uint8Array(blocks);
    this.written = new Uint16Array(blocks);
    this.liveSlots = new Uint16Array(blocks);
    this.owner = new Int32Array(blocks).fill(-1);
    this.live = new Uint8Array(blocks * this.width);
    this.at = -1;
    this.keys = [];
    const bytes = blocks * (9 + this.width);
    this.distance = Math.max(16, Math.ceil((this.count * bytes) / KEY_FRAMES_BYTES));
    while (this.at < this.count - 1) {
      this.advance();
      if (this.at % this.distance === 0) this.keys.push(this.copy());
    }
    this.seek(0);
  }

  static async read(map) {
    const names = Object.keys(map.states);
    const parts = await Promise.all(names.map((name) => inflate(map.states[name])));
    return new Pool(map, Object.fromEntries(names.map((name, i) => [name, new Stream(parts[i])])));
  }

  arrays() {
    return [this.role, this.written, this.liveSlots, this.owner, this.live];
  }

  copy() {
    return {
      at: this.at,
      arrays: this.arrays().map((array) => array.slice()),
      places: Object.values(this.streams).map((stream) => stream.at),
    };
  }

  seek(frame) {
    if (frame === this.at) return;
    const key = this.keys[Math.floor(frame / this.distance)];
    if (frame < this.at || key.at > this.at) {
      this.arrays().forEach((array, i) => array.set(key.arrays[i]));
      Object.values(this.streams).forEach((stream, i) => (stream.at = key.places[i]));
      this.at = key.at;
    }
    while (this.at < frame) this.advance();
  }

  advance() {
    const { counts, blocks, flags, written, owner, live } = this.streams;
    let block = -1;
    for (let left = counts.number(); left > 0; left--) {
      block += blocks.number();
      const flag = flags.bytes[flags.at++];
      this.role[block] = flag & 7;
      if (flag & 8) this.written[block] = written.number();
      if (flag & 16) this.owner[block] = owner.number() - 1;
      if (flag & 32) {
        let set = 0;
        for (let i = block * this.width; i < (block + 1) * this.width; i++) {
          this.live[i] = live.bytes[live.at++];
          set += BITS_SET[this.live[i]];
        }
        this.liveSlots[block] = set;
      }
    }
    this.at++;
  }

  slotIsLive(block, slot) {
    return (this.live[block * this.width + (slot >> 3)] >> (slot & 7)) & 1;
  }

  // Index of the last frame that is not later than a time; the first one if all are.
  frameAt(time) {
    const times = this.frames.time_s;
    let low = 0;
    for (let high = times.length; high - low > 1; ) {
      const middle = (low + high) >> 1;
      if (times[middle] <= time) low = middle;
      else high = middle;
    }
    return low;
  }

  ownerOf(block) {
    const { units } = this.map;
    const owner = this.owner[block];
    return units > 1 ? `unit ${owner % units} of request ${Math.floor(owner / units)}` : `request ${owner}`;
  }

  describe(block) {
    const size = this.map.block_size;
    const frames = this.frames;
    if (block === 0) return ["block 0: never handed out"];
    const role = this.role[block];
    const lines = [`block ${block.toLocaleString("en")}: ${ROLE_WORDS[role]}`];
    if (role !== ROLE.FREE) {
      lines[0] += ` ${this.ownerOf(block)}`;
      const live = this.liveSlots[block];
      const written = this.written[block];
      if (role !== ROLE.DESTINATION && role !== ROLE.LEFT) {
        lines.push(`${live} of ${size} slots live, ${written - live} dead, ${size - written} not yet written`);
      }
    }
    if (frames.from[this.at].includes(block)) lines.push("a repack moved tokens out of it since the frame before");
    if (frames.to[this.at].includes(block)) lines.push("a repack moved tokens into it since the frame before");
    return lines;
  }
}
