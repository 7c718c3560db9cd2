// What led to what: from the span that an arrow leaves to the one that it comes to.

const ARROW_COLOURS = { frame: "#22406b", launch: "#00796b", output: "#a3195b" };
const ARROW_MEANINGS = {
  frame: "a frame on its way: from rank 0's send to the rank's receive",
  launch: "a lap's work begins on the GPU",
  output: "a step's output is there, and rank 0 reads it",
};
const ARCH = 10; // pixels: there is room below the ruler
const MOST_ARROWS = 300; // of a run; more are a hedge
const [KIND, ARROW_STEP, ARROW_FRAME, TAIL_RANK, TAIL_LANE, TAIL_AT, HEAD_RANK, HEAD_LANE, HEAD_AT] =
  [0, 1, 2, 3, 4, 5, 6, 7, 8];

function drawArrows(context, run, state) {
  const { view, picked, hovered } = state;
  const from = view.from + run.origin, to = view.to + run.origin;
  const seen = run.arrows.filter((arrow) => arrow[HEAD_AT] >= from && arrow[TAIL_AT] <= to);
  run.hasTooManyArrows = seen.length > MOST_ARROWS;
  for (const arrow of seen) {
    const isChosen = hovered !== null && hovered.run === run && hovered.span[FRAME] > 0
      ? arrow[ARROW_FRAME] === hovered.span[FRAME]
      : hovered !== null && hovered.run === run && arrow[ARROW_STEP] === hovered.span[STEP];
    if (run.ranks[arrow[TAIL_RANK]].isFolded || run.ranks[arrow[HEAD_RANK]].isFolded) continue;
    if (run.hasTooManyArrows && !isChosen && arrow[ARROW_STEP] !== picked) continue;
    context.globalAlpha = picked !== null && arrow[ARROW_STEP] !== picked ? DIMMED : 0.9;
    if (isChosen) context.globalAlpha = 1;
    drawArrow(context, run, arrow, view, isChosen ? 3.5 : 1.8);
  }
  context.globalAlpha = 1;
}

function drawArrow(context, run, arrow, view, width) {
  const tail = laneOf(run, arrow[TAIL_RANK], arrow[TAIL_LANE]);
  const head = laneOf(run, arrow[HEAD_RANK], arrow[HEAD_LANE]);
  const isSame = head === tail, isDown = isSame || head.top > tail.top;
  const x1 = view.x(arrow[TAIL_AT] - run.origin), x2 = view.x(arrow[HEAD_AT] - run.origin);
  const bar = (lane) => [lane.top + lane.strip, lane.top + lane.strip + lane.bar];
  const y1 = isSame ? tail.top : bar(tail)[isDown ? 1 : 0] + (isDown ? -3 : 3);
  const y2 = isSame ? head.top + 2 : bar(head)[isDown ? 0 : 1] + (isDown ? 1 : -1);
  // within a lane it goes round above the bar
  const [lift, sag] = isSame ? [0, -ARCH * 4 / 3] : [(y2 - y1) * 0.4, 0];
  context.strokeStyle = context.fillStyle = ARROW_COLOURS[arrow[KIND]];
  context.lineWidth = width;
  context.beginPath();
  context.moveTo(x1, y1);
  context.bezierCurveTo(x1, y1 + lift + sag, x2, y2 - lift + sag, x2, y2);
  context.stroke();
  context.beginPath();
  context.arc(x1, y1, width + 0.7, 0, 7);
  context.fill();
  const back = isDown ? -9 : 9; // the head comes from where the line does
  context.beginPath();
  context.moveTo(x2, y2);
  context.lineTo(x2 - 4.5, y2 + back);
  context.lineTo(x2 + 4.5, y2 + back);
  context.fill();
  context.lineWidth = 1;
}

function laneOf(run, rank, lane) {
  return run.ranks[rank].lanes.find((each) => each.lane === lane);
}
