# PIECES, files of text, become one C++ file: their contents one after the other, as strings.
set(strings "")
foreach(piece ${PIECES})
    file(READ "${piece}" text)
    string(APPEND strings "    R\"lowkv(${text})lowkv\",\n")
endforeach()
file(WRITE "${OUT}" "#include \"queue.h\"

namespace lowkv::opencl {
namespace {
const char* const pieces[] = {
${strings}};
}
const std::span<const char* const> program_text = pieces;
}  // namespace lowkv::opencl
")
