// What the mouse points at: the span below it, and the tip that says what it is.

const NEAR = 3; // pixels: a span of less is hard to hit

// Return { run, rank, lane, span } at a place, null where there is nothing.
function spanAt(state, x, y) {
  const place = laneAt(state.runs, y);
  if (place === null || place.lane.absent || x < GUTTER) return null;
  const { run, lane } = place;
  let best = null, bestDistance = Infinity;
  for (const span of lane.spans) {
    const [top, height] = placeOf(lane, span);
    const isBubble = names[span[NAME]] === "bubble";
    if (!isBubble && (y < lane.top || y >= top + height || (span[DEPTH] && y < top))) continue;
    const left = state.view.x(span[BEGIN] - run.origin);
    const right = state.view.x(span[END] - run.origin);
    const distance = Math.max(left - x, x - right, 0);
    // of two that are equally near the inner one, which comes later, or the shorter one
    const isNearer = distance < bestDistance || (distance === bestDistance && lengthOf(span)
      <= lengthOf(best));
    if (distance <= NEAR && isNearer) [best, bestDistance] = [span, distance];
  }
  return best === null ? null : { ...place, span: best };
}

function lengthOf(span) {
  return span[END] - span[BEGIN];
}

function showTip(tip, found, event) {
  tip.hidden = found === null;
  if (found === null) return;
  const { run, rank, lane, span } = found;
  const name = names[span[NAME]];
  const step = run.steps.find(([number]) => number === span[STEP]);
  const ms = (lengthOf(span) / 1e6).toFixed(lengthOf(span) < 1e6 ? 4 : 3);
  const lines = [
    `${ms} ms${lengthOf(span) < 1e6 ? ` (${lengthInWords(lengthOf(span))})` : ""}`,
    `begins at ${((span[BEGIN] - run.origin) / 1e6).toFixed(4)} ms`,
    `rank ${rank.rank}, ${lane.title}`,
  ];
  if (span[STEP] >= 0) lines.push(`step ${span[STEP]}${step ? `: ${step[3]}` : ""}`);
  if (span[FRAME] > 0) lines.push(`frame ${span[FRAME]}`);
  tip.replaceChildren(element("b", name), element("div", meanings[name]),
    ...lines.map((words) => element("div", words)));
  const { clientX: x, clientY: y } = event;
  const right = x + 18 + tip.offsetWidth > innerWidth;
  const below = y + 18 + tip.offsetHeight > innerHeight;
  tip.style.left = `${right ? x - 12 - tip.offsetWidth : x + 18}px`;
  tip.style.top = `${below ? y - 12 - tip.offsetHeight : y + 18}px`;
}

function element(tag, words) {
  const made = document.createElement(tag);
  made.textContent = words;
  return made;
}
