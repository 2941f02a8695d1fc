// Asking before a job is cancelled, paused or resumed, and for the token that it takes.
import { useEffect, useRef, useState } from "preact/hooks";
import { change, keepToken, keptToken } from "./api";

type Of = { job: string; name: string };

export const Cancel = ({ job, name }: Of) => (
  <Order
    order="cancel"
    job={job}
    title={`Cancel job ${job} (${name})?`}
    text="Its tasks stop; what its sinks have completed stays."
    does="Cancel job"
    keeps="Keep it running"
    tone="danger"
  />
);

export const Pause = ({ job, name }: Of) => (
  <Order
    order="pause"
    job={job}
    title={`Pause job ${job} (${name})?`}
    text="Its tasks stop with no row on its way, and keep what they hold."
    does="Pause job"
    keeps="Keep it running"
  />
);

export const Resume = ({ job, name }: Of) => (
  <Order
    order="resume"
    job={job}
    title={`Resume job ${job} (${name})?`}
    text="Its tasks go on where they stand."
    does="Resume job"
    keeps="Keep it paused"
  />
);

type Asked = { order: string; job: string; title: string; text: string; does: string; keeps: string; tone?: string };

function Order({ order, job, title, text, does, keeps, tone }: Asked) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [error, setError] = useState("");
  const [token, setToken] = useState(keptToken() ?? "");
  const [busy, setBusy] = useState(false);

  async function send(event: Event) {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      await change(`jobs/${job}/${order}`, token.trim());
      keepToken(token.trim());
      dialog.current?.close();
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
    setBusy(false);
  }

  return (
    <>
      <button type="button" class={tone} onClick={() => dialog.current?.showModal()}>
        {does}
      </button>
      <dialog ref={dialog} aria-labelledby={`${order}-title`}>
        <form onSubmit={send}>
          <h2 id={`${order}-title`}>{title}</h2>
          <p>{text}</p>
          <TokenField token={token} set={setToken} />
          {error !== "" && (
            <p class="failure" role="alert">
              {error}
            </p>
          )}
          <p class="buttons">
            <button type="button" onClick={() => dialog.current?.close()}>
              {keeps}
            </button>
            <button type="submit" class={tone} disabled={busy || token.trim() === ""}>
              {does}
            </button>
          </p>
        </form>
      </dialog>
    </>
  );
}

export function TokenField({ token, set }: { token: string; set: (token: string) => void }) {
  return (
    <label class="field">
      <span>
        Token (<code>minishuffle cluster token</code> prints it)
      </span>
      <input
        type="password"
        autocomplete="off"
        spellcheck={false}
        value={token}
        onInput={(event) => set(event.currentTarget.value)}
      />
    </label>
  );
}

/** For a cluster whose reads are not open to all. */
export function TokenWanted() {
  const [token, set] = useState("");
  const field = useRef<HTMLFormElement>(null);
  useEffect(() => field.current?.querySelector("input")?.focus(), []);
  return (
    <form
      ref={field}
      class="card token"
      onSubmit={(event) => {
        event.preventDefault();
        keepToken(token.trim());
      }}
    >
      <h2>This cluster shows itself to those who have its token</h2>
      <TokenField token={token} set={set} />
      {keptToken() !== null && (
        <p class="failure" role="alert">
          That is not the cluster's token.
        </p>
      )}
      <p class="buttons">
        <button type="submit" disabled={token.trim() === ""}>
          Show the cluster
        </button>
      </p>
    </form>
  );
}
