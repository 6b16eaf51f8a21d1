/** Reads one file out of a ZIP archive, as ChatGPT and Claude export. */

const END = 0x06054b50;
const ENTRY = 0x02014b50;
const END_BYTES = 22;
const ENTRY_BYTES = 46;
const LOCAL_BYTES = 30;
const MOST_COMMENT = 0xffff;
const MOST_BYTES = 1 << 29; // of the file that is read; no browser holds more as one text
const MOST_DIRECTORY = 1 << 26; // chosen: of a million files

/**
 * The text of the file of this name in an archive, whatever folder it lies in.
 *
 * @param {Blob} blob
 * @param {string} name
 * @returns {Promise<?string>} null where this is no archive, or has no such file that can be read
 */
export async function textInZip(blob, name) {
  const tail = await view(blob, Math.max(0, blob.size - END_BYTES - MOST_COMMENT), blob.size);
  let end = tail.byteLength - END_BYTES;
  while (end >= 0 && tail.getUint32(end, true) !== END) end -= 1;
  if (end < 0) return null;
  const from = tail.getUint32(end + 16, true);
  const size = tail.getUint32(end + 12, true);
  if (size > MOST_DIRECTORY) return null;
  const entry = find(await view(blob, from, from + size), name);
  if (!entry || entry.numBytes > MOST_BYTES) return null;
  const local = await view(blob, entry.at, entry.at + LOCAL_BYTES);
  if (local.byteLength < LOCAL_BYTES) return null;
  const begin = entry.at + LOCAL_BYTES + local.getUint16(26, true) + local.getUint16(28, true);
  const packed = blob.slice(begin, begin + entry.numPacked);
  if (entry.method === 0) return packed.text();
  return entry.method === 8 ? textOf(packed.stream().pipeThrough(new DecompressionStream('deflate-raw')), entry.numBytes) : null;
}

/** The text of a stream of so many bytes. Rejects as soon as there are more. */
async function textOf(stream, numBytes) {
  const decoder = new TextDecoder();
  const parts = [];
  let left = numBytes;
  for (const reader = stream.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return parts.join('') + decoder.decode();
    left -= value.byteLength;
    if (left < 0) {
      await reader.cancel();
      throw new Error('too long');
    }
    parts.push(decoder.decode(value, { stream: true }));
  }
}

/** Where the directory says that a file lies, and how it is packed. */
function find(directory, name) {
  const decoder = new TextDecoder();
  for (let at = 0; at + ENTRY_BYTES <= directory.byteLength && directory.getUint32(at, true) === ENTRY;) {
    const lengths = [28, 30, 32].map((field) => directory.getUint16(at + field, true));
    const path = decoder.decode(new Uint8Array(directory.buffer, at + ENTRY_BYTES, Math.min(lengths[0], directory.byteLength - at - ENTRY_BYTES)));
    if (path.split('/').at(-1) === name) {
      return { method: directory.getUint16(at + 10, true), numPacked: directory.getUint32(at + 20, true), numBytes: directory.getUint32(at + 24, true),
        at: directory.getUint32(at + 42, true) };
    }
    at += ENTRY_BYTES + lengths[0] + lengths[1] + lengths[2];
  }
  return null;
}

const view = async (blob, from, to) => new DataView(await blob.slice(from, to).arrayBuffer());
