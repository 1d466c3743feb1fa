# The kernels are compiled once per instruction set. A function that the linker may merge with one of the same name (an inline function of
# a header that was not inlined, a template) would exist once for AVX-512 and once for every machine, and the linker keeps the one it
# meets first: the library would then crash on processors without AVX-512. So no object of the kernels may define a weak function.
#
# The same ids must train to the same bits everywhere, so none may contain a fused multiply-add, which rounds once instead of twice. And
# kernels that the compiler no longer vectorises would only be slow, which nobody notices: VECTOR is an instruction that must be there.
#
# cmake -DNM=nm -DOBJDUMP=objdump -DOBJECTS=a.o;b.o -DVECTOR=regex -P kernel_objects.cmake
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} --defined-only ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${NM} cannot read ${object}")
  endif()
  if(NOT symbols MATCHES "kKernels")
    message(FATAL_ERROR "${object}: expected the kernels of an instruction set")
  endif()
  # W: a weak function. V is a weak object, such as the address of the exception handler. u: unique in the process, as static
  # variables of inline functions are.
  string(REGEX MATCHALL "[0-9a-f]+ [Wu] [^\n]+" weak "${symbols}")
  if(weak)
    list(JOIN weak "\n  " list)
    message(SEND_ERROR "${object}: define these always_inline, or in an unnamed namespace:\n  ${list}")
  endif()
  execute_process(COMMAND ${OBJDUMP} -d --no-show-raw-insn ${object} OUTPUT_VARIABLE code RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${OBJDUMP} cannot read ${object}")
  endif()
  # x86-64: vfmadd213ps, vfnmsub231ss, ... aarch64: fmla, fmls, fmadd, fnmsub, ...
  string(REGEX MATCH "[^\n]*\t(vfn?m(add|sub)[0-9a-z]*|fml[as]|fn?m(add|sub))[ \t][^\n]*" fused "${code}")
  if(fused)
    message(SEND_ERROR "${object}: expected no fused multiply-add, found\n  ${fused}\nIs -ffp-contract=off missing?")
  endif()
  if(VECTOR AND NOT code MATCHES "${VECTOR}")
    message(SEND_ERROR "${object}: expected an instruction that matches ${VECTOR}. Are the kernels still vectorised?")
  endif()
endforeach()
