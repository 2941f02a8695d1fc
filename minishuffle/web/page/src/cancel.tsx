// Asking before a job is cancelled, and for the token that it takes.
import { useEffect, useRef, useState } from "preact/hooks";
import { change, keepToken, keptToken } from "./api";

export function Cancel({ job, name }: { job: string; name: string }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [error, setError] = useState("");
  const [token, setToken] = useState(keptToken() ?? "");
  const [busy, setBusy] = useState(false);

  async function cancel(event: Event) {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      await change(`jobs/${job}/cancel`, token.trim());
      keepToken(token.trim());
      dialog.current?.close();
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
    setBusy(false);
  }

  return (
    <>
      <button type="button" class="danger" onClick={() => dialog.current?.showModal()}>
        Cancel job
      </button>
      <dialog ref={dialog} aria-labelledby="cancel-title">
        <form onSubmit={cancel}>
          <h2 id="cancel-title">
            Cancel job {job} ({name})?
          </h2>
          <p>Its tasks stop; what its sinks have completed stays.</p>
          <TokenField token={token} set={setToken} />
          {error !== "" && (
            <p class="failure" role="alert">
              {error}
            </p>
          )}
          <p class="buttons">
            <button type="button" onClick={() => dialog.current?.close()}>
              Keep it running
            </button>
            <button type="submit" class="danger" disabled={busy || token.trim() === ""}>
              Cancel job
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
