// Event time of a vertex: the watermarks that its subtasks sent last.
import type { Task } from "./api";
import { count, duration, instant } from "./format";

const MICROSECONDS = 1e6;
const ENDED = new Set(["finished", "failed", "canceled"]);

/** Of one subtask; `at`: when the coordinator said so, by its clock. */
export function Watermark({ task, at }: { task: Task; at: number }) {
  const { watermark } = task.counters;
  if (task.state === "finished") return <>ended</>;
  if (watermark === null) return <span class="quiet">none yet</span>;
  const seconds = watermark / MICROSECONDS;
  return (
    <>
      <time>{instant(seconds)}</time> <span class="quiet">{behind(at - seconds)}</span>
    </>
  );
}

/** Of all subtasks together: the least of those that have not ended. */
export function VertexWatermark({ tasks, at }: { tasks: Task[]; at: number }) {
  const open = tasks.filter((task) => !ENDED.has(task.state));
  if (open.length === 0) return <>ended</>;
  const sent = open.filter((task) => task.counters.watermark !== null);
  if (sent.length === 0) return <>none yet</>;
  const least = sent.reduce((best, task) => (task.counters.watermark! < best.counters.watermark! ? task : best));
  const without = open.length - sent.length;
  return (
    <>
      <Watermark task={least} at={at} />
      {open.length > 1 && <span class="quiet"> (subtask {least.index}, the least)</span>}
      {without > 0 && <span class="quiet">; none yet in {count(without)} of {count(open.length)}</span>}
    </>
  );
}

function behind(seconds: number): string {
  if (Math.abs(seconds) < 1) return "now";
  return seconds > 0 ? `${duration(seconds)} behind now` : `${duration(-seconds)} ahead of now`;
}
