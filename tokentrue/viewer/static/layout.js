// Lines for the token view: every row has the same height, so that any row of a hundred thousand tokens is found by a division.
import { shown } from "./colours.js";

export const PICTURE_ROWS = 7; // a line that names the image, and its picture below
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]/u;

export function cells(text) {
  if (/^[\u0020-\u02ff]*$/.test(text)) return text.length;
  let total = 0;
  for (const character of text) total += WIDE.test(character) ? 2 : 1;
  return total;
}

// Lines of `columns` cells, broken at blanks where there are any.
export function wrap(text, columns) {
  const lines = [];
  for (const paragraph of text.split("\n")) {
    let rest = paragraph;
    while (rest.length > columns) {
      const at = rest.lastIndexOf(" ", columns);
      const cut = at > columns / 2 ? at + 1 : columns;
      lines.push(rest.slice(0, cut));
      rest = rest.slice(cut);
    }
    lines.push(rest);
  }
  return lines;
}

export function messageLines(message, columns) {
  if (!message) return [];
  const lines = [];
  const add = (text, kind) => {
    for (const line of wrap(text, columns)) lines.push([line, kind]);
  };
  if (message.reasoning) add(message.reasoning.trim(), "reasoning");
  if (message.content) add(message.content.replace(/\n+$/, ""), "content");
  for (const call of message.calls ?? []) add(`→ ${call.name}(${call.arguments})`, "call");
  return lines;
}

// Rows of the whole branch, in flat arrays: which block, which tokens [from, to), which line of the message; a head row has from = -1.
export function layOut(branch, tokenColumns, messageColumns) {
  const { token_ids: ids, pieces, blocks } = branch;
  const block = [];
  const from = [];
  const to = [];
  const message = [];
  const picture = []; // image * PICTURE_ROWS + line within it; -1 elsewhere
  const images = new Map(branch.images.map((image, number) => [image[0], number]));
  const texts = [];
  const heads = [];
  const broken = new Map(); // id -> does its text end a line
  const widths = new Map();
  blocks.forEach((b, at) => {
    const lines = messageLines(b.message, messageColumns);
    texts.push(lines);
    heads.push(block.length);
    block.push(at);
    from.push(-1);
    to.push(b.start);
    message.push(-1);
    picture.push(-1);
    const first = block.length;
    let start = b.start;
    let used = 0;
    const push = (end, shows = -1) => {
      block.push(at);
      picture.push(shows);
      from.push(start);
      to.push(end);
      message.push(block.length - 1 - first < lines.length ? block.length - 1 - first : -1);
      start = end;
      used = 0;
    };
    for (let i = b.start; i < b.end; i++) {
      const number = images.get(i);
      if (number !== undefined) {
        const end = i + branch.images[number][1];
        if (used > 0) push(i);
        for (let row = 0; row < PICTURE_ROWS; row++) push(end, number * PICTURE_ROWS + row);
        i = end - 1;
        continue;
      }
      const id = ids[i];
      let width = widths.get(id);
      if (width === undefined) {
        width = cells(shown(pieces, id)) + 0.22;
        widths.set(id, width);
        broken.set(id, pieces[id] !== undefined && pieces[id][0].endsWith("\n"));
      }
      if (used > 0 && used + width > tokenColumns) push(i);
      used += width;
      if (broken.get(id)) push(i + 1);
    }
    if (start < b.end) push(b.end);
    while (block.length - first < lines.length) push(b.end);
  });
  return { block, from, to, message, picture, texts, heads, length: block.length };
}

// The row of token `i`: the first whose end lies after it.
export function rowOf(rows, i) {
  let low = 0;
  let high = rows.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows.to[middle] > i) high = middle;
    else low = middle + 1;
  }
  return low;
}
