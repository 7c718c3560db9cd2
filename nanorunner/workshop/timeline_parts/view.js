// Time and pixels: which part of the common clock the page shows, and how it moves.
//
// Times are in ns since a run's origin: the begin of its first step here, or of the picked one.

const GUTTER = 118; // pixels at the left, for the lanes' names
const RIGHT = 12;
const SHORTEST = 2000; // ns: the most that one can zoom in

class View {
  constructor(first, last) {
    this.first = first; // the limits: nothing is before or after
    this.last = last;
    this.from = first;
    this.to = last;
    this.left = GUTTER;
    this.width = 1000;
  }

  get scale() { // pixels a ns
    return (this.width - GUTTER - RIGHT) / (this.to - this.from);
  }

  x(time) {
    return GUTTER + (time - this.from) * this.scale;
  }

  time(x) {
    return this.from + (x - GUTTER) / this.scale;
  }

  limit(first, last) {
    this.first = first;
    this.last = last;
  }

  show(from, to) {
    const length = Math.min(Math.max(to - from, SHORTEST), this.last - this.first);
    this.from = Math.min(Math.max(from, this.first), this.last - length);
    this.to = this.from + length;
  }

  move(share) { // of what is shown, to the right
    const by = (this.to - this.from) * share;
    this.show(this.from + by, this.to + by);
  }

  zoom(factor, x) { // around a place; factor > 1 shows more
    const at = this.time(Math.min(Math.max(x, GUTTER), this.width - RIGHT));
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }
}

// "493 us" or "12.3 ms", as many digits as one can read.
function lengthInWords(ns) {
  const number = (value) => value >= 100 ? value.toFixed(0) : value.toPrecision(3);
  if (ns < 1000) return `${Math.round(ns)} ns`;
  return ns < 999500 ? `${number(ns / 1e3)} \u00b5s` : `${number(ns / 1e6)} ms`;
}

// The places of about `most` ticks between two times: 1, 2 or 5 times a power of ten apart.
function ticks(from, to, most) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const apart = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= rough);
  const found = [];
  for (let n = Math.ceil(from / apart); n * apart <= to; n++) found.push(n * apart);
  return { found, digits: Math.max(0, 6 - Math.floor(Math.log10(apart) + 1e-9)) };
}
