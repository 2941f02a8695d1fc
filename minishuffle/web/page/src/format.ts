// Numbers, times and states as texts.
import type { Level } from "./api";

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
/** What a Date can hold. */
const DATE_MS_MAX = 8.64e15;
const MOMENT = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export const count = (value: number): string => COUNT.format(value);
export const short = (value: number): string => (value < 1000 ? COUNT.format(value) : SHORT.format(value));
export const rate = (value: number): string => `${short(value)}/s`;
export const percent = (share: number): string => `${Math.round(share * 100)} %`;
export const clock = (at: number): string => CLOCK.format(new Date(at * 1000));
export const moment = (at: number): string => MOMENT.format(new Date(at * 1000));
/** A time of event time, which may be any; seconds since 1970. */
export function instant(at: number): string {
  const ms = Math.round(at * 1000);
  return Math.abs(ms) > DATE_MS_MAX ? `${COUNT.format(at)} s` : `${MOMENT.format(new Date(ms))}.${String(((ms % 1000) + 1000) % 1000).padStart(3, "0")}`;
}
/** The time of today, or the date as well. */
export const when = (at: number, now: number): string => (now - at < 72_000 ? clock(at) : moment(at));
export const millis = (seconds: number): string => {
  const ms = seconds * 1000;
  return ms < 1 ? `${ms < 0.05 ? "0" : ms.toFixed(1)} ms` : ms < 10 ? `${ms.toFixed(1)} ms` : ms < 10_000 ? `${Math.round(ms)} ms` : `${seconds.toFixed(1)} s`;
};

export function duration(seconds: number): string {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

export function bytes(value: number): string {
  let left = value;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (left < 1024) return `${unit === "B" ? left : left.toFixed(1)} ${unit}`;
    left /= 1024;
  }
  return `${left.toFixed(1)} GiB`;
}

/** OK <= 0.10 < LOW <= 0.50 < HIGH, as `minishuffle top` has it. */
export const level = (backpressured: number): Level =>
  backpressured <= 0.1 ? "OK" : backpressured <= 0.5 ? "LOW" : "HIGH";

export type Tone = "good" | "plain" | "warn" | "bad" | "idle";

const TONES: Record<string, Tone> = {
  running: "good",
  alive: "good",
  finished: "plain",
  created: "idle",
  canceled: "idle",
  gone: "idle",
  awaited: "warn",
  pausing: "warn",
  paused: "warn",
  canceling: "warn",
  failing: "warn",
  finished_with_loss: "warn",
  waiting: "idle",
  restarting: "warn",
  "waiting for a slot": "warn",
  lost: "bad",
  failed: "bad",
  abandoned: "bad",
};
export const tone = (state: string): Tone => TONES[state] ?? "plain";
export const words = (state: string): string => state.replaceAll("_", " ");
export const isOver = (state: string): boolean => ["finished", "finished_with_loss", "failed", "canceled"].includes(state);
