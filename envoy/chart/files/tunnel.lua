-- The tunnel: a gRPC stream on one side, bare RESP on the other.
--
-- A proxy-wasm filter can hold one kind of two-way stream open, a gRPC stream, and Redis does not speak gRPC.
-- This script stands between them, inside Envoy, and translates the one thing that differs: gRPC puts five bytes
-- before each message (one flag byte, then the message's length as four bytes, most significant first).
--
--   request:   five-byte heads are taken out, wherever the chunks happen to be cut
--   response:  each chunk that Redis sent gets a head of its own, and so is a message
--
-- A message is therefore a piece of a byte stream, on either side, and never a unit of RESP: the filter's decoder
-- puts replies together itself. Nothing is held back: a chunk goes on in the turn in which it came.

local HEAD = 5

-- Reads request chunks one after the other. Keeps, between chunks, how much of the current message is still to
-- come, and the bytes of a head that a chunk's end cut in two.
local function deframer()
  local head, left = "", 0
  return function(chunk)
    local out, at, size = {}, 1, #chunk
    while at <= size do
      if left > 0 then
        local piece = chunk:sub(at, at + left - 1)
        out[#out + 1] = piece
        at, left = at + #piece, left - #piece
      else
        local piece = chunk:sub(at, at + HEAD - #head - 1)
        head, at = head .. piece, at + #piece
        if #head == HEAD then
          local _, a, b, c, d = head:byte(1, HEAD)
          head, left = "", ((a * 256 + b) * 256 + c) * 256 + d
        end
      end
    end
    return table.concat(out)
  end
end

-- Turns one chunk of the response into one gRPC message, uncompressed (flag byte 0).
local function frame(chunk)
  local size = #chunk
  local d = size % 256
  local c = math.floor(size / 256) % 256
  local b = math.floor(size / 65536) % 256
  local a = math.floor(size / 16777216) % 256
  return string.char(0, a, b, c, d) .. chunk
end

local function translate(handle, with)
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      chunk:setBytes(with(chunk:getBytes(0, size)))
    end
  end
end

function envoy_on_request(handle)
  translate(handle, deframer())
end

function envoy_on_response(handle)
  translate(handle, frame)
end
