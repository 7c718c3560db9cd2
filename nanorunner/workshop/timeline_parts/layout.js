// Where everything stands from top to bottom: runs, in each its ranks, in each the rank's lanes.
//
//     run      title, and the ruler: time, and a flag where each step is planned
//     cpu      strip: which step; bar: the laps; below it what lies inside of them
//     wire     bar: send, receive, run
//     gpu      as cpu; the bubbles stand in the bar, their lengths below
//     absent   a sentence
//
// A folded rank is its name alone, and no arrow leaves it or comes to it.

const RUN_TITLE = 28, RULER = 54, STRIP = 6, BAR = 32, INNER = 17, WIRE_BAR = 22, ABSENT = 22;
const FOLDED = 24, BUBBLE_ROW = 19, LANE_GAP = 7, RANK_GAP = 13, RUN_GAP = 16;
const NAME = 0, BEGIN = 1, END = 2, STEP = 3, FRAME = 4, DEPTH = 5; // of a span

// Give each run, rank and lane its place; return the height of all.
function layOut(runs) {
  let y = 0;
  for (const run of runs) {
    run.top = y;
    y += RUN_TITLE + RULER;
    run.lanesTop = y;
    for (const rank of run.ranks) {
      rank.top = y;
      if (rank.isFolded) y += FOLDED + LANE_GAP;
      else for (const lane of rank.lanes) y = layOutLane(lane, y) + LANE_GAP;
      rank.bottom = y - LANE_GAP;
      y += RANK_GAP;
    }
    run.bottom = y - RANK_GAP;
    y += RUN_GAP;
  }
  return y;
}

function layOutLane(lane, y) {
  lane.top = y;
  if (lane.absent) return lane.bottom = y + ABSENT;
  const depth = lane.spans.reduce((most, span) => Math.max(most, span[DEPTH]), 0);
  lane.strip = lane.lane === "wire" ? 0 : STRIP;
  lane.bar = lane.lane === "wire" ? WIRE_BAR : BAR;
  lane.bubbleRow = lane.spans.some((span) => names[span[NAME]] === "bubble") ? BUBBLE_ROW : 0;
  const inner = lane.lane === "wire" ? 0 : depth * INNER;
  return lane.bottom = y + lane.strip + lane.bar + inner + lane.bubbleRow;
}

// Return the top and the height of a span.
function placeOf(lane, span) {
  const top = lane.top + lane.strip;
  if (lane.lane === "wire" || span[DEPTH] === 0) return [top, lane.bar];
  return [top + lane.bar + (span[DEPTH] - 1) * INNER, INNER];
}

// Return the rank at a height, null where there is none.
function rankAt(runs, y) {
  const ranks = runs.flatMap((run) => run.ranks);
  return ranks.find((rank) => y >= rank.top && y < rank.bottom) ?? null;
}

// Return the lane at a height, and its run and rank.
function laneAt(runs, y) {
  for (const run of runs) {
    for (const rank of run.ranks.filter((each) => !each.isFolded)) {
      for (const lane of rank.lanes) {
        if (y >= lane.top && y < lane.bottom) return { run, rank, lane };
      }
    }
  }
  return null;
}
